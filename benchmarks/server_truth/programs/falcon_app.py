"""Falcon, for any WSGI server."""

from __future__ import annotations

import falcon

from benchmarks.server_truth.programs.work import classify, finish


class Classes:
    """Classifies what is posted."""

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        response.media = finish(classify())


app = falcon.App()
app.add_route("/classify", Classes())
