#!/usr/bin/env python3
"""Draws docs/img/coded-page.svg: the bytes of a page of 64 entries in s4, head size 64, as the CPU lays them out."""

FONT = 'font-family="sans-serif"'
PLANES = [("keys: 4 blocks of 16 entries", 2048, "#cfe3f7"), ("values: 4 blocks of 16 entries", 2048, "#d9efd0"),
          ("scales", 256, "#f8e3b6")]


def text(x, y, s, size=13, anchor="start", weight="normal"):
    return f'<text x="{x}" y="{y}" {FONT} font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{s}</text>'


def rect(x, y, w, h, fill, stroke="#444"):
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{stroke}" stroke-width="1"/>'


def main():
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 430" width="860" height="430">',
           '<rect width="860" height="430" fill="white"/>',
           text(20, 26, "A page of 64 entries in s4, head size 64: 4,352 bytes, where a dense one takes 16,384", 15, weight="bold")]
    x, width = 20, 820
    total = sum(size for _, size, _ in PLANES)
    for name, size, fill in PLANES:
        w = width * size / total
        out.append(rect(x, 42, round(w, 1), 44, fill))
        if size > 300:
            for i in range(1, 4):
                out.append(f'<line x1="{x + w * i / 4:.1f}" y1="42" x2="{x + w * i / 4:.1f}" y2="86" stroke="#444" stroke-dasharray="3 3"/>')
            out.append(text(round(x + w / 2), 69, f"{name}, {size} B", anchor="middle"))
        else:
            out.append(text(x + w, 102, f"{name}, {size} B", 12, "end"))
        x += w
    # A key block.
    out += [text(20, 140, "A key block: 8 vectors of 64 bytes; a lane is an entry, a byte two groups of four dimensions", 14, weight="bold")]
    for lane in range(16):
        lx = 20 + lane * 51
        out.append(rect(lx, 152, 51, 30, "#cfe3f7"))
        out.append(text(lx + 25, 172, f"e {lane}", 11, "middle"))
    out.append(text(20, 202, "lane of entry 0, first vector:", 12))
    for j in range(4):
        bx = 215 + j * 155
        out.append(rect(bx, 188, 75, 24, "#eef6fd"))
        out.append(rect(bx + 75, 188, 75, 24, "#b9d5f0"))
        out.append(text(bx + 37, 204, f"dim {4 + j}", 11, "middle"))
        out.append(text(bx + 112, 204, f"dim {j}", 11, "middle"))
    out.append(text(215, 228, "high and low four bits of bytes 0, 1, 2, 3: one byte dot product takes four dimensions of 16 entries", 11))
    # A value block.
    out += [text(20, 264, "A value block: 4 groups of four entries, 2 vectors each; a lane is a dimension", 14, weight="bold")]
    for lane in range(16):
        lx = 20 + lane * 51
        out.append(rect(lx, 276, 51, 30, "#d9efd0"))
        out.append(text(lx + 25, 296, f"d {lane}", 11, "middle"))
    out.append(text(20, 326, "lane of dimension 0:", 12))
    for j in range(4):
        bx = 215 + j * 155
        out.append(rect(bx, 312, 75, 24, "#f1f9ec"))
        out.append(rect(bx + 75, 312, 75, 24, "#c3e3b4"))
        out.append(text(bx + 37, 328, f"e {j} dim 16", 11, "middle"))
        out.append(text(bx + 112, 328, f"e {j} dim 0", 11, "middle"))
    out.append(text(215, 352, "one byte dot product adds four entries, each with its weight, to 16 dimensions", 11))
    # Scales.
    out += [text(20, 388, "Scales: 64 fp16 of the keys, then 64 of the values.", 13),
            text(20, 408, "A code is a sign bit above the index of a level; the level times the scale is a coordinate of the turned vector.", 13),
            "</svg>"]
    with open("docs/img/coded-page.svg", "w", encoding="ascii") as f:
        f.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
