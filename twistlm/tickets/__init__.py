"""(6) Deployment: choose, extract, prove, write and load a ticket."""
