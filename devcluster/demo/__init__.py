"""`make demo`: shows Atoll on a real Kubernetes in a terminal, and checks the promises at the end.

facts.py has the rows to show, in pure functions; observer.py reads and acts through the API server; stage.py draws;
scenes.py has the scenes; __main__.py is the command. It uses nothing that a user with kubectl could not use.
"""
