"""``shoal ui``: the studies of a directory as a page in the browser of this machine.

    reading.py    what the page shows of a study, as JSON; follows its database
    server.py     who may ask for it: this machine's user, with the token, and nobody else's page
    page.*        the page: no code, style or font from elsewhere

It reads what studies wrote, as ``shoal show`` does, and changes nothing.
"""
