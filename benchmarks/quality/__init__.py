"""Where trainings end at equal steps: rules, codecs and graphs against `ddp` or plain gossip."""
