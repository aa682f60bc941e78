"""Messages between members of a sweep and its scheduler, over a local socket: `client` is a member's end,
`seats` the scheduler's.

Nothing here is public."""
