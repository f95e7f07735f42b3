"""What is measured, as YAML and the command line say it: composed, checked, and explained."""
