// Quality over bytes as an SVG picture: one line a series, points marked, both axes with round numbers. Pure, any
// thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace loupe {

struct PlotPoint {
  double x = 0, y = 0;
  double low = 0, high = 0;  // of y; drawn if they differ
};
struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;
};
struct Plot {
  std::string title, x_label, y_label;
  bool log_y = false;  // points at or below 0 are left out then
  std::vector<PlotSeries> series;
};

// x is shown in percent on a logarithmic axis.
std::string ToSvg(const Plot& plot);
// INVALID_ARGUMENT if the file cannot be written or does not end in .svg: asked before a long run, and again by WriteSvg.
absl::Status CheckPlotPath(const std::string& path);
absl::Status WriteSvg(const Plot& plot, const std::string& path);

}  // namespace loupe
