"""Steps and seconds to a loss: methods, their rates, and variants of them."""
