"""Plans of CPU offload as plain values, without torch: a step's memory needs, and which blocks are loaded together.

Nothing here is public."""
