"""Trainings that share devices: sweeps, schedules and turns."""
