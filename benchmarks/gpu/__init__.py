"""What gossip costs a CUDA device, measured on one or counted without."""
