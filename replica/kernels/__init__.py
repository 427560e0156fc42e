"""What a GPU computes beside attention: products of few tokens, what lies between them, sampling."""
