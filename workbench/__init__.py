"""The experiment workbench: what puts model and data together, runs it and records it."""
