"""What a GPU computes beside attention: products, what lies between them, sampling."""
