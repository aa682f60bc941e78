"""Members of a rehearsal: a strategy's part of each worker.

`strategies` takes them from it. Public: nothing, `crew` uses them.
"""
