"""Connections of elastic workers: frames of JSON and bytes, a listening port with greetings, the mesh among members.

Public: none."""
