"""What requests, errors and back ends are, whatever carries them."""
