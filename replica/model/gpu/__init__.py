"""What a GPU computes beside attention: matrix products and what lies between them."""
