"""Who starts trials. Every launcher runs `workbench.trial` in a process of its own."""
