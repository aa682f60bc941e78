"""What partial backprop saves, and what it loses."""
