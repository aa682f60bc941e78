"""Memory layout of a model: alike on all workers at set-up, and put back where it changes. Public: none.

A message is flat memory, and strides define which number of it is which. Workers with other strides (one of them in
channels_last) would average the numbers of different places.
"""
