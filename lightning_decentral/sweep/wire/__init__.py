"""What members of a sweep and its scheduler say to each other, over a local socket.

Nothing here is public.
"""
