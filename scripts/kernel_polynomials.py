"""Write marl_pool/compiled/native/src/polynomials.hpp: the kernel's polynomials.

    python scripts/kernel_polynomials.py > marl_pool/compiled/native/src/polynomials.hpp

- 2^f for f in [-1/2, 1/2], for `exp2`.
- Φ(x) for GELU: from Φ(-a) / φ(a), a >= 0, where φ is needed for the gradient or in
  float64; as 1/2 + x p(x²), of fewer operations but a higher degree, elsewhere.
- e^z for |z| <= R, for attention by moments, in units of ln 2.
"""

import mpmath
from mpmath import mpf

mpmath.mp.dps = 60
RANGES = (1, 2, 4, 8)
END = mpf("5.2")  # Φ is 1 to a rounding error


def fit(function, low, high, degree, weight=lambda x: mpf(1)):
    """Return the monomials of a weighted least-squares fit at Chebyshev nodes."""
    count = 4 * (degree + 1)
    nodes = [mpmath.cos(mpmath.pi * (2 * k + 1) / (2 * count)) for k in range(count)]
    points = [(low + high) / 2 + (high - low) / 2 * node for node in nodes]
    rows = mpmath.matrix(count, degree + 1)
    values = mpmath.matrix(count, 1)
    for i, x in enumerate(points):
        for p in range(degree + 1):
            rows[i, p] = weight(x) * x**p
        values[i] = weight(x) * function(x)
    return list(mpmath.lu_solve(rows, values))


def table(kind, name, coefficients):
    """Print an array; ``constant`` picks it by type and index."""
    degree = f"  static constexpr int degree = {len(coefficients) - 1};"
    structure(
        f"{name}<{kind}>", kind.split(",")[0], coefficients, degree, "template <> "
    )


def structure(name, kind, coefficients, line="", prefix=""):
    """Print a struct with an array of coefficients and another ``line``."""
    numbers = ", ".join(mpmath.nstr(number, 20) for number in coefficients)
    print(f"{prefix}struct {name} {{")
    if line:
        print(line)
    print(f"  static constexpr {kind} coefficients[] = {{{numbers}}};")
    print("};")


def normal():
    """Print the polynomials of the normal distribution."""

    def root(t):
        return END * mpmath.sqrt((t + 1) / 2)

    def center(t):
        return mpmath.erf(root(t) / mpmath.sqrt(2)) / 2 / root(t)

    def ratio(a):
        upper = mpmath.erfc(a / mpmath.sqrt(2)) / 2
        return upper * mpmath.sqrt(2 * mpmath.pi) / bell(a * a)

    def bell(square):
        return mpmath.exp(-square / 2)

    print("\n// (Φ(x) - 1/2) / x as a polynomial in 2 (x / end)² - 1, for |x| <= end.")
    coefficients = fit(center, mpf(-1), mpf(1), 13, root)
    end = f"  static constexpr double end = {mpmath.nstr(END, 5)};"
    structure("NormalCenter", "float", coefficients, end)
    print("\n// Φ(-a) / φ(a) for 0 <= a <= 12; errors are weighted with φ(a).")
    print("template <class Real> struct MillsRatio;")
    for kind, degree, most in (("float", 11, 7), ("double", 30, 9)):
        weight = lambda a: (1 + a) * bell(a * a)  # noqa: E731
        table(kind, "MillsRatio", fit(ratio, mpf(0), mpf(most), degree, weight))


def main():
    """Print the header."""
    print("// Written by scripts/kernel_polynomials.py.")
    print("#pragma once\n\nnamespace marl_pool {\n")
    print("// 2^f for |f| <= 1/2.\ntemplate <class Real> struct PowerOfTwo;")
    half = mpf(1) / 2
    for kind, degree in (("float", 6), ("double", 12)):
        table(kind, "PowerOfTwo", fit(lambda f: mpf(2) ** f, -half, half, degree))
    normal()
    print("\n// 2^z for |z| <= R / ln 2.")
    print("template <class Real, int R> struct ExponentialSeries;")
    log2 = mpmath.log(2)
    for kind, degrees in (("float", (8, 11, 15, 22)), ("double", (14, 18, 22, 32))):
        for bound, degree in zip(RANGES, degrees, strict=True):
            series = fit(mpmath.exp, mpf(-bound), mpf(bound), degree)
            scaled = [c * log2**p for p, c in enumerate(series)]
            table(f"{kind}, {bound}", "ExponentialSeries", scaled)
    print("\n}  // namespace marl_pool")


if __name__ == "__main__":
    main()
