// Numbers for people, as router_replay.number_format writes them in the terminal.
const ABSENT = "–";

function scientific(value, digits) {
  if (!value) return "0";
  const [mantissa, exponent] = value.toExponential(digits).split("e");
  return `${mantissa}e${Number(exponent)}`;
}

function percent(value) {
  if (!value) return "0";
  const size = Math.abs(value);
  if (size < 1) return String(Number(value.toPrecision(2)));
  if (value >= 99.95 && value < 100) return Math.min(value, 99.999).toFixed(3);
  return size < 1e6 ? value.toFixed(1) : scientific(value, 2);
}

function number(value, kind) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  const size = Math.abs(value);
  if (kind === "small") return scientific(value, 2);
  if (kind === "share") return `${percent(100 * value)} %`;
  if (kind === "count") return size < 1e15 ? Math.round(value).toLocaleString("en") : scientific(value, 2);
  if (kind === "seconds") return `${size >= 1e9 ? scientific(value, 2) : value.toFixed(size < 10 ? 2 : 1)} s`;
  if (kind === "ratio") return size >= 1e6 ? `${scientific(value, 2)}×` : `${size >= 0.095 ? value.toFixed(2) : Number(value.toPrecision(2))}×`;
  return !value || (size >= 5e-4 && size < 1e6) ? value.toFixed(3) : scientific(value, 2);
}

// What Vega writes at the ticks of an axis.
const TICKS = { share: "~%", small: "~e", count: "~s", seconds: "~g", plain: "~g", ratio: "~g" };

const COLOURS = ["#d55e00", "#0b78b8", "#009670", "#b0578d", "#a07300", "#6b7480", "#2a8ac8"];
const colour = (index) => COLOURS[Math.abs(index) % COLOURS.length];

// The ticks of a logarithmic axis: at most six powers of ten, and also 2 and 5 times them if there are few.
function decades(low, high) {
  const factors = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) ticks.push(...factors.map((factor) => Number(`${factor}e${power}`)));
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.filter((_, index) => index % Math.ceil(inside.length / 6) === 0);
}

const drawings = {};
