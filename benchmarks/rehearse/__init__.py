"""What rehearsals and simulations predict, against what came, and what they cost."""
