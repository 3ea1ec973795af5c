// Integers of 128 bits.
typedef __int128 I;
typedef unsigned __int128 U;

extern "C" __global__ void wide(const U *a, const U *b, U *out) {
  int i = threadIdx.x;
  U u = a[i], v = b[i], *o = out + 12 * i;
  I x = (I)u, y = (I)v;
  int by = (int)v & 127;
  o[0] = u + v; o[1] = u - v; o[2] = u * v; o[3] = u / v; o[4] = u % v; o[5] = (U)(x / y); o[6] = (U)(x % y);
  o[7] = u / 1000003u; o[8] = (U)(x % 1000); o[9] = u << by; o[10] = (U)(x >> by);
  o[11] = (U)(x < y) | (U)(u < v) << 1;
}
