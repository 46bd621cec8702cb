#!/bin/sh
# Bundles the parts of Apache ECharts that the pages use: tools/bundle_echarts.sh
#
# Needs node and npm, and is run by whoever takes up another version or another kind of chart; nobody else needs node.
# The result, its licences and its digest are committed, so that the package loads nothing when it is built or used.
set -eu

ECHARTS=6.1.0
ESBUILD=0.28.2
OUT=$(cd "$(dirname "$0")/.." && pwd)/src/posttrain/web/static/echarts
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
cd "$WORK"

echo '{"private": true}' > package.json
# No install scripts: esbuild's binary comes as a package of its own.
npm install --ignore-scripts --no-audit --no-fund --save-exact "echarts@$ECHARTS" "esbuild@$ESBUILD"
cat > entry.js <<'JS'
import { use } from "echarts/core";
import {
  BarChart, CustomChart, GraphChart, HeatmapChart, LineChart, ParallelChart, ScatterChart,
} from "echarts/charts";
import {
  AriaComponent, DataZoomComponent, GridComponent, LegendComponent, MarkLineComponent, ParallelComponent,
  TooltipComponent, VisualMapComponent,
} from "echarts/components";
import { SVGRenderer } from "echarts/renderers";
use([
  BarChart, CustomChart, GraphChart, HeatmapChart, LineChart, ParallelChart, ScatterChart, AriaComponent,
  DataZoomComponent, GridComponent, LegendComponent, MarkLineComponent, ParallelComponent, TooltipComponent,
  VisualMapComponent, SVGRenderer,
]);
export { init, version } from "echarts/core";
JS
ZRENDER=$(node -p 'require("zrender/package.json").version')
node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=echarts --legal-comments=none \
  --banner:js="/*! Apache ECharts $ECHARTS (Apache-2.0) with zrender $ZRENDER (BSD-3-Clause) and tslib (0BSD), bundled by tools/bundle_echarts.sh */" \
  --outfile=echarts.min.js
mkdir -p "$OUT"
cp echarts.min.js "$OUT/echarts.min.js"
cp node_modules/echarts/LICENSE "$OUT/LICENSE"
cp node_modules/echarts/NOTICE "$OUT/NOTICE"
cp node_modules/zrender/LICENSE "$OUT/LICENSE.zrender"
cp node_modules/tslib/LICENSE.txt "$OUT/LICENSE.tslib"
cd "$OUT"
sha256sum echarts.min.js > SHA256SUMS
cat SHA256SUMS
