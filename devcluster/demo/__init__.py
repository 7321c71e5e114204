"""`make demo`: Atoll at work on a real Kubernetes, watched in a terminal and checked at the end.

facts.py says what there is to see, in pure functions; observer.py looks and acts through the API server; stage.py
draws; scenes.py is the play; __main__.py is the command. Nothing here knows more of Atoll than a user with kubectl.
"""
