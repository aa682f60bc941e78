"""Who trains together when workers die and join: numbered views, a lobby and a member as pure functions of time.

    state, what arrived, now -> state, what is to be done

No sockets, no clock, no torch: `shared/wire/elastic` runs these on real ones, the tests on virtual ones.

Public: none yet; `view` says what a view is, `lobby` and `member` are the two machines.
"""
