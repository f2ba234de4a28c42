// The product instruction of sm_90a: 64 rows of the weight, whose 16-bit operands lie in registers, by TN rows of x in shared
// memory. Needs elements.cu before it. Definition: TN, as in gemm.cu.

#define ALL4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define ALL16(b) ALL4(b), ALL4(b + 4), ALL4(b + 8), ALL4(b + 12)
#define TO32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TO64 TO32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TO128 TO64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TO176 TO128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87"
#define TO256 TO128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#if TN == 32
#define INTO TO32
#define OPERANDS "{%16,%17,%18,%19}, %20"
#define SUMS_OF ALL16(0)
#elif TN == 64
#define INTO TO64
#define OPERANDS "{%32,%33,%34,%35}, %36"
#define SUMS_OF ALL16(0), ALL16(16)
#elif TN == 128
#define INTO TO128
#define OPERANDS "{%64,%65,%66,%67}, %68"
#define SUMS_OF ALL16(0), ALL16(16), ALL16(32), ALL16(48)
#elif TN == 176
#define INTO TO176
#define OPERANDS "{%88,%89,%90,%91}, %92"
#define SUMS_OF ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL4(80), ALL4(84)
#else
#define INTO TO256
#define OPERANDS "{%128,%129,%130,%131}, %132"
#define SUMS_OF ALL16(0), ALL16(16), ALL16(32), ALL16(48), ALL16(64), ALL16(80), ALL16(96), ALL16(112)
#endif
#define TEXT_OF(n) #n
#define SIZE_OF(n) "m64n" TEXT_OF(n) "k16"
#define PRODUCT(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned." SIZE_OF(TN) ".f32." TYPE "." TYPE " {" INTO "}, " OPERANDS ", 1, 1, 1, 0;" \
                 : SUMS_OF : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
constexpr int SUMS = TN / 2; // of a thread
// d += a b, 64 x TN x 16; b a descriptor of shared memory.
DEVICE void product(bf16, float (&d)[SUMS], const u32 (&a)[4], u64 b) { PRODUCT("bf16"); }
DEVICE void product(f16, float (&d)[SUMS], const u32 (&a)[4], u64 b) { PRODUCT("f16"); }

DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// A tile of lines of 128 bytes, swizzled, as products take it.
DEVICE u64 tile_at(u32 at) { return (u64)(at >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
