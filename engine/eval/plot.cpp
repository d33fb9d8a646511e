#include "engine/eval/plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace loupe {
namespace {

constexpr double kWidth = 760, kHeight = 460, kLeft = 80, kRight = 180, kTop = 40, kBottom = 60;
// Colours that stay apart for colour-blind readers (Okabe and Ito).
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                    "#e69f00", "#56b4e9", "#000000", "#8c564b"};

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// One axis: from values to pixels.
struct Axis {
  bool log = false;
  double low = 0, high = 1, from = 0, to = 1;

  double Place(double v) const {
    const double a = log ? std::log10(low) : low, b = log ? std::log10(high) : high, x = log ? std::log10(v) : v;
    return from + (to - from) * (b > a ? (x - a) / (b - a) : 0.5);
  }
  std::vector<double> Ticks() const {
    std::vector<double> ticks;
    if (!log) {
      const double raw = (high - low) / 5, unit = std::pow(10, std::floor(std::log10(raw)));
      const double step = raw / unit < 1.5   ? unit
                          : raw / unit < 3.5 ? 2 * unit
                          : raw / unit < 7.5 ? 5 * unit
                                             : 10 * unit;
      for (double v = std::ceil(low / step) * step; v <= high * (1 + 1e-9); v += step) ticks.push_back(v);
      return ticks;
    }
    for (double decade = std::pow(10, std::floor(std::log10(low))); decade <= high * (1 + 1e-9); decade *= 10) {
      for (const double digit : {1.0, 2.0, 5.0}) {
        if (digit * decade >= low * (1 - 1e-9) && digit * decade <= high * (1 + 1e-9)) ticks.push_back(digit * decade);
      }
    }
    return ticks;
  }
};

bool Shown(const Plot& plot, const PlotPoint& p) { return p.x > 0 && (!plot.log_y || p.y > 0); }

void FitAxes(const Plot& plot, Axis* x, Axis* y) {
  double x_low = 1e300, x_high = 0, y_low = 1e300, y_high = -1e300;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& p : series.points) {
      if (!Shown(plot, p)) continue;
      x_low = std::min(x_low, p.x), x_high = std::max(x_high, p.x);
      y_low = std::min(y_low, p.y), y_high = std::max({y_high, p.y, p.high});
    }
  }
  if (x_high == 0) x_low = 0.1, x_high = 1, y_low = 0, y_high = 1;
  *x = {true, x_low / 1.15, x_high * 1.15, kLeft, kWidth - kRight};
  *y = {plot.log_y, plot.log_y ? y_low / 1.4 : std::min(0.0, y_low), plot.log_y ? y_high * 1.4 : y_high * 1.05 + 1e-12,
        kHeight - kBottom, kTop};
}

void DrawAxes(const Plot& plot, const Axis& x, const Axis& y, std::string* svg) {
  for (const double v : x.Ticks()) {
    absl::StrAppendFormat(svg,
                          "<line x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f' stroke='#ddd'/><text x='%.1f' y='%.1f' "
                          "text-anchor='middle'>%g %%</text>\n",
                          x.Place(v), x.Place(v), kTop, kHeight - kBottom, x.Place(v), kHeight - kBottom + 18, 100 * v);
  }
  for (const double v : y.Ticks()) {
    absl::StrAppendFormat(svg,
                          "<line x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f' stroke='#ddd'/><text x='%.1f' y='%.1f' "
                          "text-anchor='end'>%g</text>\n",
                          kLeft, kWidth - kRight, y.Place(v), y.Place(v), kLeft - 8, y.Place(v) + 4, v);
  }
  absl::StrAppendFormat(svg, "<rect x='%g' y='%g' width='%g' height='%g' fill='none' stroke='#444'/>\n", kLeft, kTop,
                        kWidth - kLeft - kRight, kHeight - kTop - kBottom);
  absl::StrAppendFormat(svg, "<text x='%.1f' y='24' font-size='15'>%s</text>\n", kLeft, Escape(plot.title));
  absl::StrAppendFormat(svg, "<text x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n", (kLeft + kWidth - kRight) / 2,
                        kHeight - 16, Escape(plot.x_label));
  absl::StrAppendFormat(svg, "<text transform='translate(18 %.1f) rotate(-90)' text-anchor='middle'>%s</text>\n",
                        (kTop + kHeight - kBottom) / 2, Escape(plot.y_label));
}

}  // namespace

std::string ToSvg(const Plot& plot) {
  Axis x, y;
  FitAxes(plot, &x, &y);
  std::string svg = absl::StrFormat(
      "<svg xmlns='http://www.w3.org/2000/svg' width='%g' height='%g' font-family='sans-serif' font-size='12'>\n"
      "<rect width='100%%' height='100%%' fill='white'/>\n",
      kWidth, kHeight);
  DrawAxes(plot, x, y, &svg);
  for (size_t i = 0; i < plot.series.size(); ++i) {
    const char* colour = kColours[i % std::size(kColours)];
    std::vector<PlotPoint> points;
    for (const PlotPoint& p : plot.series[i].points) {
      if (Shown(plot, p)) points.push_back(p);
    }
    std::sort(points.begin(), points.end(), [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
    std::string line;
    for (const PlotPoint& p : points) {
      absl::StrAppendFormat(&line, "%.1f,%.1f ", x.Place(p.x), y.Place(p.y));
      absl::StrAppendFormat(&svg, "<circle cx='%.1f' cy='%.1f' r='3.5' fill='%s'/>\n", x.Place(p.x), y.Place(p.y),
                            colour);
      const double low = plot.log_y ? std::max(p.low, y.low) : p.low;
      if (p.high > p.low) {
        absl::StrAppendFormat(&svg, "<line x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f' stroke='%s'/>\n", x.Place(p.x),
                              x.Place(p.x), y.Place(low), y.Place(p.high), colour);
      }
    }
    absl::StrAppendFormat(&svg, "<polyline points='%s' fill='none' stroke='%s' stroke-width='1.5'/>\n", line, colour);
    const double at = kTop + 14 + 18 * static_cast<double>(i);
    absl::StrAppendFormat(&svg, "<circle cx='%.1f' cy='%.1f' r='4' fill='%s'/><text x='%.1f' y='%.1f'>%s</text>\n",
                          kWidth - kRight + 16, at - 4, colour, kWidth - kRight + 26, at, Escape(plot.series[i].name));
  }
  return svg + "</svg>\n";
}

absl::Status CheckPlotPath(const std::string& path) {
  if (!path.ends_with(".svg"))
    return absl::InvalidArgumentError(absl::StrCat("--plot ", path, ": the name must end in .svg"));
  if (!std::ofstream(path, std::ios::app)) return absl::InvalidArgumentError(absl::StrCat("--plot ", path, " cannot be written"));
  return absl::OkStatus();
}

absl::Status WriteSvg(const Plot& plot, const std::string& path) {
  if (absl::Status s = CheckPlotPath(path); !s.ok()) return s;
  std::ofstream out(path, std::ios::binary);
  out << ToSvg(plot);
  out.close();
  if (!out) return absl::InvalidArgumentError(absl::StrCat("--plot ", path, " cannot be written"));
  return absl::OkStatus();
}

}  // namespace loupe
