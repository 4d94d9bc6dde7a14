"""thin"""


def write_page(run, path):
    path.write_text("thin")
    return path
