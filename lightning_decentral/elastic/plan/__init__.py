"""The elastic protocol as values: numbered views, the lobby and a member as pure functions of time.

    state, message received, now -> state, actions

No sockets, no clock, no torch: `wire` runs these on real ones, the tests on virtual ones. A `view` is who trains
together; `lobby_state` and `member_state` are the two machines, `messages` what they send each other. Public: none.
"""
