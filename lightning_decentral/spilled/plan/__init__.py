"""Plans of CPU offload as plain values, without torch: what a step asks of its device, which blocks travel together.

Nothing here is public.
"""
