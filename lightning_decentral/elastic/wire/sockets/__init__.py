"""Connections of elastic workers: frames of JSON and bytes, TLS by a run's key, a listening port with greetings, ways
to members that aren't reached (`dialing`), the mesh among members.

Public: none."""
