"""The KVServer: task engines of several engine instances in one process, for those who want that.

messages   what is said          liveness   who is still there
desk       one client            server     the loop
client     KVDPClient, the backend of a KVManager          spawn   starting a server
connection its way to the server, and to the next one
"""
