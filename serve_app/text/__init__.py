"""Between text and tokens: templates, tool calls, stop strings, log probabilities, grammars."""
