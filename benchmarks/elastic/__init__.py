"""Workers that die and come: what that costs the others."""
