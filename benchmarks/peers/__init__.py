"""Other trainers on the same tiny network, each against a loop written by hand in its own framework."""
