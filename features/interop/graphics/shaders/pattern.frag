#version 450
// A pattern of which every pixel is known: see Pattern::pixel.
layout(push_constant) uniform Frame { uint number; } frame;
layout(location = 0) out vec4 color;
void main() {
    uvec2 at = uvec2(gl_FragCoord.xy);
    uvec3 rgb = uvec3(at.x * 3u + frame.number, at.y * 5u + frame.number, (at.x ^ at.y) + frame.number * 7u) & 255u;
    color = vec4(vec3(rgb) / 255.0, 1.0);
}
