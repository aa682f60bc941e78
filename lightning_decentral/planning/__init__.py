"""Which method to train with: candidates, their forecasts side by side, and what is said and drawn of them."""
