"""What a strategy does between the workers of a rehearsal, one part for each of them: `strategies` takes it from it."""
