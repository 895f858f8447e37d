"""What training programs share: learners, runs, logs, options."""
