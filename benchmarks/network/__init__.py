"""What slow networks do to a training, and how well that was predicted."""
