"""Schedulers of many trainings as values, without torch or sockets: policies, arbiters, simulation, JigSaw, SPASE.

Public: the policies of `policy`; all else serves the sweep and `lightning-decentral schedule`."""
