"""What ``scripts.py`` changes in the scripts of others, each as a diff, and scripts of what pip
installs.
"""
