"""What a strategy does between the workers of a rehearsal, one part for each of them.

`strategies` takes them from it. Public: nothing, `crew` uses them.
"""
