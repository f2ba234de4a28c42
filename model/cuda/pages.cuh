// The cache as kernels see it. Keys and values of a layer lie apart, each [page][kv head][position][dim].
//
// One sequence alone has one page as large as its context. Many share pages of PAGE positions: a sequence is a
// list of page numbers, and every row of a step says where its own begins.
constexpr u32 PAGE = 64;

struct Pages {
    const u32 *position, *lists, *numbers;
    u64 page_stride, head_stride;
};
// position u32[rows], lists u32[rows]: row r stands at position[r] of the sequence whose pages are numbers[lists[r]] on.
// lists = 0: row r stands at position[0] + r of the only sequence. Strides in elements, between pages and between heads.

DEVICE u32 position_of(const Pages &pages, u32 row) { return pages.lists ? pages.position[row] : pages.position[0] + row; }
// A sequence's page numbers; none of one that is alone.
DEVICE const u32 *list_at(const Pages &pages, u32 list) { return pages.lists ? pages.numbers + list : 0; }
DEVICE const u32 *list_of(const Pages &pages, u32 row) { return pages.lists ? pages.numbers + pages.lists[row] : 0; }
// How far behind a head's first element of page 0 position p of its sequence is.
DEVICE u64 place_of(const u32 *list, u64 page_stride, u32 p, u32 dim) {
    return list ? list[p / PAGE] * page_stride + (u64)(p % PAGE * dim) : (u64)p * dim;
}
