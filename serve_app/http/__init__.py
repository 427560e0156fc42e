"""The OpenAI API over HTTP: from bytes to a request, and from outputs to bytes."""
