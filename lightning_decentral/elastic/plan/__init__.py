"""The elastic protocol as pure functions of state, message and time, for the lobby and for a member.

    state, message received, now -> state, actions

No sockets, no clock, no torch: `wire` adds real sockets and clocks, tests add virtual ones. A `view` is a numbered
membership; `lobby_state` and `member_state` are state machines, which exchange `messages`; `commit` is that of an outer
round. Public: none."""
