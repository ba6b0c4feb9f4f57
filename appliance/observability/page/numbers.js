// Numbers as people read them. Bytes in binary units, times in what fits.

export const count = (n) => Math.round(n).toLocaleString("en");
export const sum = (values) => values.reduce((a, b) => a + b, 0);

const isNearEnd = (share) => (share > 0 && share < 0.0995) || (share > 0.9 && share < 0.9995);
export const percent = (share) =>
  share === null ? "–" : `${(100 * share).toFixed(isNearEnd(share) ? 1 : 0)} %`;

/** A price has its policy's own unit. */
export const price = (n) =>
  n === null
    ? "–"
    : n !== 0 && (Math.abs(n) < 1e-3 || Math.abs(n) >= 1e6)
      ? n.toExponential(2)
      : n.toPrecision(4);

export function bytes(n) {
  const unit = n < 1 ? 0 : Math.min(5, Math.floor(Math.log2(n) / 10));
  const value = n / 1024 ** unit;
  return `${value.toFixed(unit && value < 99.95 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

export function seconds(s) {
  if (s < 0.9995) return s < 0.000995 ? `${(s * 1e6).toFixed(0)} µs` : `${(s * 1e3).toPrecision(3)} ms`;
  if (s < 120) return `${s.toFixed(s < 9.95 ? 1 : 0)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return s < 172800
    ? `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`
    : `${(s / 86400).toFixed(1)} days`;
}

/** Ages change while one looks: no more digits than that. */
export const age = (s) => (s < 0.95 ? `${s.toFixed(1)} s` : seconds(s));
