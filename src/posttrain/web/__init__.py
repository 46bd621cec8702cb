"""The server: pages, the HTTP API, feedback; and the report, which is the pages in one file.

`app.py` puts the app together; `server.py` has the limits on time, size and connections, and the signals that end it;
`access.py` finds out who sends a request and what they may do: each route names the least role, and a test calls every
operation as every role. A page is a template, a route and its texts in two languages; no script and no style is
inline. The server never holds the workspace's lock: what it writes are short transactions.

Charts are options of Apache ECharts, plain data with a table of the same numbers (`posttrain.report.charts`);
`static/charts.js` draws them. The report has its scripts inside, with a policy that names their hashes.
`static/label_outbox.js` keeps an answer until the server acknowledges it, through a lost connection and a new session.
"""
