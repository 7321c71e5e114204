"""`make demo`: shows Atoll on a real Kubernetes in a terminal and checks its promises at the end.

facts.py computes table rows in pure functions; observer.py reads and acts through the API server; stage.py draws;
scenes.py has the scenes; __main__.py is the command. The demo uses only what a user with kubectl can use.
"""
