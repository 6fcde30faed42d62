"""Write marl_pool/kernels/native/polynomials.hpp: the kernel's polynomials.

    python scripts/kernel_polynomials.py > marl_pool/kernels/native/polynomials.hpp

- 2^f for f in [-1/2, 1/2], for `exp2`.
- e^{a²/2} Φ(-a) for a >= 0, for GELU. Errors are weighted with e^{-a²/2}.
- e^z for |z| <= R, for attention by moments, in units of ln 2.
"""

import mpmath
from mpmath import mpf

mpmath.mp.dps = 60
RANGES = (1, 2, 4, 8)


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
    numbers = ", ".join(mpmath.nstr(number, 20) for number in coefficients)
    print(f"template <> struct {name}<{kind}> {{")
    print(f"  static constexpr int degree = {len(coefficients) - 1};")
    print(f"  static constexpr {kind.split(',')[0]} coefficients[] = {{{numbers}}};")
    print("};")


def main():
    """Print the header."""
    print("// Written by scripts/kernel_polynomials.py.")
    print("#pragma once\n\nnamespace marl_pool {\n")
    print("// 2^f for |f| <= 1/2.\ntemplate <class Real> struct PowerOfTwo;")
    half = mpf(1) / 2
    for kind, degree in (("float", 6), ("double", 12)):
        table(kind, "PowerOfTwo", fit(lambda f: mpf(2) ** f, -half, half, degree))
    print("\n// e^{a²/2} Φ(-a) for a >= 0.\ntemplate <class Real> struct NormalTail;")

    def tail(a):
        return mpmath.erfc(a / mpmath.sqrt(2)) / 2 * mpmath.exp(a * a / 2)

    for kind, degree, end in (("float", 11, 7), ("double", 30, 9)):
        weight = lambda a: (1 + a) * mpmath.exp(-a * a / 2)  # noqa: E731
        table(kind, "NormalTail", fit(tail, mpf(0), mpf(end), degree, weight))
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
